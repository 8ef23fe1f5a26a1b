"""Every private name of torch that remat relies on, behind functions of our own, a file for each topic.

A torch version that moves one of them breaks this folder and no other, with one clear error.
"""

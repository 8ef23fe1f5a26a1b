"""Every private name of torch that remat uses, behind functions of this package, one file for each topic.

A torch version that moves one of them breaks this folder only, with one clear error.
"""

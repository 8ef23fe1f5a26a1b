"""The referee: runs a schedule, and says what it peaks at and how long it takes."""

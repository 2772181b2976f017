"""From a ModelSpec to a ready Model, and its end: completing, warming up, counting, resizing."""

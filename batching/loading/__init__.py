"""From a ModelSpec to a Model that is ready, and its end: completing, warming up, counting, resizing."""

"""Reports: the document that a run leaves, as JSON and as one HTML page, and several runs side by side."""

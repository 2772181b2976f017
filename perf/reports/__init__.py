"""Reports: the document of a run, as JSON and as one HTML page, and comparisons of several runs."""

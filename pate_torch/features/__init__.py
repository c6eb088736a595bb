"""Features of points, learned or computed from public points alone."""

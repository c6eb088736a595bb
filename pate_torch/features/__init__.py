"""Features of points, learnt or computed from public points alone."""

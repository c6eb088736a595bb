"""Query strategies: which public points to ask."""

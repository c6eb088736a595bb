"""Releases of several sites that do not trust each other: keys, charter, masks, shares of noise and rounds."""

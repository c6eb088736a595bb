"""Learn by an algorithm of the papers on hypothesis classes, and release the hypothesis."""

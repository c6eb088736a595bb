"""The Python interface: PATEClassifier, PATE and PrivateLabeler."""

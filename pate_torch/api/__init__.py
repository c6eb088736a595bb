"""What users call: PATEClassifier, PATE and PrivateLabeler."""

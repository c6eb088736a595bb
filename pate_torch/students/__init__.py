"""Students: models trained on released labels and public points, which may be published."""

"""Audits of what runs against what is claimed: mechanisms on neighboring votes, and a student against its records."""

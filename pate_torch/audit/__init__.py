"""Does what is executed keep what is claimed? Mechanisms on neighboring votes, and a student against its records."""

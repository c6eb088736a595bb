"""Does what is executed keep what is claimed? Mechanisms on neighbouring votes, and a student against its records."""

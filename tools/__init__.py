"""Tools of a checkout for those who change it; no part of the installed package."""

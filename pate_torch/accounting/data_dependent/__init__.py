"""Data-dependent prices: functions of private votes, for the data's owner alone, unless noise makes them private."""

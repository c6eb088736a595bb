"""What everything else stands on: argument checks, seeded streams, threads, progress, files, locks."""

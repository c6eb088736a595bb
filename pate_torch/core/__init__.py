"""The lowest layer: argument checks, seeded streams, devices and threads, progress, files and folders of runs."""

"""``python -m pate_verify`` is ``pate-verify``."""

from pate_verify.command import main

raise SystemExit(main())

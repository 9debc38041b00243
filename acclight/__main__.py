"""`python -m acclight` is the command `acclight`."""

from acclight.cli.main import main

raise SystemExit(main())

"""The documented entry point `python -m varuna.run_varuna`; the command is in `varuna.cli.run`."""

from varuna.cli.run import main

if __name__ == "__main__":
    main()

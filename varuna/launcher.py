"""The documented entry point `python -m varuna.launcher`; the command is in `varuna.cli.launch`."""

from varuna.cli.launch import main

if __name__ == "__main__":
    main()

"""The demo: `varuna demo` trains a small GPT over workers, then in one plain process, and compares."""

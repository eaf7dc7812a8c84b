"""The command `varuna doctor`: checks this machine, the other machines and the store before a job starts."""

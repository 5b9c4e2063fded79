"""The acceptance chain: what it asks of hosts and engine, what it expected beforehand, and what it saw."""

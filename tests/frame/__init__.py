"""The real playbooks/provision.yml on fake hosts, with stand-ins for the roles that change a real one."""

"""Virtual machines that behave as GPU hosts: real kernel, real RDMA modules, stand-in nvidia modules (docs/lab.md)."""

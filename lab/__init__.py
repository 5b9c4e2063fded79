"""The lab: GPU hosts that need no GPU, on one machine (docs/lab.md).

``python -m lab up`` builds and starts everything and runs site.yml; ``down`` removes exactly what ``up`` made;
``status`` says what is there.
"""

"""The parts of step 2: one answer judged, and one module per ability or promise of the API."""

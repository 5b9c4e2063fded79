"""What a campaign leaves for the next person: one page of facts and ten boxes, both made from what was measured.

Import from the modules: ``values`` (the types), ``sheet`` (the page), ``checklist`` (the boxes).
"""

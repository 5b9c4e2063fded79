"""The stand-in for GPU hardware: one state on a host, the programs that answer from it, and the packages they come in.

``kimi_standin`` is what lands on hosts (standard library only), ``packages.yml`` says which package carries what,
``plan`` turns that into packages, ``repository`` writes signed apt repositories, ``host`` says what a lab host starts
with. Every program, module description and GPU name says that it is a stand-in.
"""

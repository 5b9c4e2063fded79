"""A streaming HTTP/1.1 client for measuring: one thread, one epoll loop, a stamp per read, bytes parsed after the run.

``wire`` and ``sse`` turn bytes into meaning and back, ``connection`` owns a socket, ``origin`` is one server with what
it takes to reach it, ``driver`` sends many requests at once, ``exchange`` keeps what came back of one.
"""

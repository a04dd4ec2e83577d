BUILDERS = {}
class Queue:
    def __init__(self, n): pass

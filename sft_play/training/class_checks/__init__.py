"""What a small model of the class shows, in place of lists of names: do rows stay apart, where do
adapters go, which kernels compute the same.
"""

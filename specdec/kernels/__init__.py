"""Triton kernels, each with the signature of the torch function that defines its result. Importing them needs Triton.

Run on a CPU by Triton's interpreter where TRITON_INTERPRET=1 is set before the first import.
"""

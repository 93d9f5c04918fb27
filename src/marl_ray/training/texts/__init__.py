"""The texts that language policies are taught from.

They are demonstrations, and responses that other policies have served.
"""

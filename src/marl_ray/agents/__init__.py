"""Language agents: their prompts, the parsing of their calls, and the tools that they call.

The package runs without torch and Ray.
"""

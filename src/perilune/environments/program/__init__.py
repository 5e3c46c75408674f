"""Agent programs as environments: each calls a model through OpenAI's interface and is trained unchanged.

A gateway answers its calls with the policy's turns.
"""

"""Programs of others as environments: an agent that calls a model through OpenAI's interface is trained as it
is. A gateway answers its calls with the policy's turns.
"""

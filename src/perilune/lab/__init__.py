"""The lab: injects failures into short runs on the fake cloud, and checks that they recover."""

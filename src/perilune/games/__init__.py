"""Games: OpenSpiel and Connect Four, their teachers, exact play, and ratings."""

"""Games: OpenSpiel and Connect Four, game teachers, exact play and ratings."""

"""`ringattn verify-trainer`: a user's training script on one process and on several, compared step by step."""

"""Diagnosis of a machine (`ringattn doctor`) and of a failed run (`ringattn flight`)."""

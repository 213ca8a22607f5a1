"""The first hour on a machine: steps one after the other, a file to go on from, and what to send whom."""

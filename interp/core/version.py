"""The version of the package, which records, `interp --version` and what is built of the package take from here."""

VERSION = "0.2.0"

"""Reports: the results of studies, audits and runs as one page that opens in a browser without a network."""

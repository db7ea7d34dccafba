"""`tfdist-doctor`: a diagnosis of the installation, the machine and the network, with remedies."""

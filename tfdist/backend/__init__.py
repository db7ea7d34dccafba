"""Private names of TensorFlow and Keras, the transport library, time stamps in a graph."""

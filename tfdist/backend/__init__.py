"""Everything private of TensorFlow and Keras, the transport library, and time stamps in a graph."""

"""Work on TensorFlow graphs that TensorFlow has no public function for."""

//! Causal attention with grouped heads, a window and documents in f64, with whole rows of scores.

use std::ops::Range;

#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub b: usize,
    pub t: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub d: usize,
    pub group_size: usize,
    pub group_offset: usize,
    pub window: usize,
    /// Tokens of a document; those at the borders of sequences may be shorter. 0: each sequence is one.
    pub document: usize,
    /// Of the keys every so many-th, from this one on.
    pub of: usize,
    pub which: usize,
    pub scale: f64,
}

impl Sizes {
    pub fn q_len(&self) -> usize {
        self.b * self.t * self.heads * self.d
    }

    pub fn kv_len(&self) -> usize {
        self.b * self.keys() * self.kv_heads * self.d
    }

    fn q_row(&self, [sequence, head, position]: [usize; 3]) -> Range<usize> {
        let start = ((sequence * self.t + position) * self.heads + head) * self.d;
        start..start + self.d
    }

    fn kv_row(&self, [sequence, head, position]: [usize; 3]) -> Range<usize> {
        let head = (self.group_offset + head) / self.group_size;
        let start = ((sequence * self.keys() + position) * self.kv_heads + head) * self.d;
        start..start + self.d
    }

    /// Keys of a sequence.
    pub fn keys(&self) -> usize {
        self.keys_before(self.t)
    }

    fn keys_before(&self, position: usize) -> usize {
        position.saturating_sub(self.which).div_ceil(self.of)
    }

    /// The keys that a query sees.
    pub fn seen(&self, sequence: usize, query: usize) -> Range<usize> {
        let in_window = (query + 1).saturating_sub(self.window);
        let first = in_window.max(self.document_start(sequence, query));
        self.keys_before(first)..self.keys_before(query + 1)
    }

    /// Where the document of a position begins.
    pub fn document_start(&self, sequence: usize, position: usize) -> usize {
        match self.document {
            0 => 0,
            len => position.saturating_sub((position + 3 * sequence) % len),
        }
    }

    /// (sequence, head, position) of each number of (b, heads, t).
    pub fn rows(self) -> impl Iterator<Item = [usize; 3]> {
        (0..self.b * self.heads * self.t)
            .map(move |i| [i / self.t / self.heads, i / self.t % self.heads, i % self.t])
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn add(to: &mut [f64], factor: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

/// The weights of the keys that query `row` sees, and the log-sum-exp of its scores.
fn weights(s: Sizes, [q, k]: [&[f64]; 2], row: [usize; 3]) -> (Vec<f64>, f64) {
    let [sequence, head, position] = row;
    let key = |j| &k[s.kv_row([sequence, head, j])];
    let scores: Vec<f64> = s
        .seen(sequence, position)
        .map(|j| s.scale * dot(&q[s.q_row(row)], key(j)))
        .collect();
    let lse = scores.iter().map(|x| x.exp()).sum::<f64>().ln();
    (scores.iter().map(|x| (x - lse).exp()).collect(), lse)
}

/// The output, and the log-sum-exp (b, heads, t).
pub fn forward(s: Sizes, [q, k, v]: [&[f64]; 3]) -> (Vec<f64>, Vec<f64>) {
    let mut o = vec![0.0; s.q_len()];
    let lse = s.rows().map(|row| {
        let (weights, lse) = weights(s, [q, k], row);
        for (j, weight) in s.seen(row[0], row[2]).zip(&weights) {
            add(
                &mut o[s.q_row(row)],
                *weight,
                &v[s.kv_row([row[0], row[1], j])],
            );
        }
        lse
    });
    let lse = lse.collect();
    (o, lse)
}

/// The gradients of q, k and v by the chain rule of the softmax, from the output's gradient and `delta` (b, heads, t),
/// its product with the output.
pub fn backward(s: Sizes, [q, k, v]: [&[f64]; 3], grad: &[f64], delta: &[f64]) -> [Vec<f64>; 3] {
    let (mut dq, mut dk, mut dv) = (
        vec![0.0; s.q_len()],
        vec![0.0; s.kv_len()],
        vec![0.0; s.kv_len()],
    );
    for (row, delta) in s.rows().zip(delta) {
        let grad = &grad[s.q_row(row)];
        for (j, weight) in s.seen(row[0], row[2]).zip(weights(s, [q, k], row).0) {
            let key = s.kv_row([row[0], row[1], j]);
            let ds = s.scale * weight * (dot(grad, &v[key.clone()]) - delta);
            add(&mut dq[s.q_row(row)], ds, &k[key.clone()]);
            add(&mut dk[key.clone()], ds, &q[s.q_row(row)]);
            add(&mut dv[key], weight, grad);
        }
    }
    [dq, dk, dv]
}

/// The product of the output and its gradient, row by row.
pub fn delta(s: Sizes, o: &[f64], grad: &[f64]) -> Vec<f64> {
    s.rows()
        .map(|row| dot(&o[s.q_row(row)], &grad[s.q_row(row)]))
        .collect()
}

#[test]
fn the_gradients_are_the_slopes_of_the_output() {
    let s = Sizes {
        b: 1,
        t: 6,
        heads: 3,
        kv_heads: 2,
        d: 2,
        group_size: 2,
        group_offset: 1,
        window: 4,
        document: 5,
        of: 1,
        which: 0,
        scale: 0.7,
    };
    let mut rng = crate::element::rng(9);
    let mut random =
        |len| crate::element::to_f64(&crate::element::random::<f32>(&mut rng, len, 1.0));
    let (inputs, grad) = (
        [random(s.q_len()), random(s.kv_len()), random(s.kv_len())],
        random(s.q_len()),
    );
    let output = |inputs: &[Vec<f64>; 3]| forward(s, inputs.each_ref().map(|x| &x[..])).0;
    let delta = delta(s, &output(&inputs), &grad);
    let gradients = backward(s, inputs.each_ref().map(|x| &x[..]), &grad, &delta);
    for (which, gradient) in gradients.iter().enumerate() {
        for (i, gradient) in gradient.iter().enumerate() {
            let at = |step: f64| {
                let mut inputs = inputs.clone();
                inputs[which][i] += step;
                dot(&output(&inputs), &grad)
            };
            let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!(
                (gradient - slope).abs() < 1e-8,
                "input {which}, element {i}: {gradient} and {slope}"
            );
        }
    }
}

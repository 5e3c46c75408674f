"""Equality of mathematical answers: `is_equal` accepts equal forms and rejects other answers."""

import re
import time

import pytest

from perilune.environments.core.mathematics import is_equal

# Each entry is an answer, then outputs. `;;` separates entries.
EQUAL = r"""
\frac{1}{2} ~ 1/2 ~ 0.5 ~ \dfrac12 ~ \tfrac{1}{2} ~ \frac12 ~ .5 ~ $\frac{1}{2}$ ~ \(\frac{1}{2}\)
\frac{1}{2} ~ \[\frac{1}{2}\] ;; 0.5 ~ \frac{1}{2} ~ 50\%
-\frac{2}{3} ~ \frac{-2}{3} ~ -2/3 ~ \frac{2}{-3} ;; \frac{3}{2} ~ 1\frac{1}{2} ;; \frac{7}{2} ~ 3 1/2
1000 ~ 1,000 ~ 1000.0 ~ 1000. ~ \$1,000 ;; 1,000 ~ 1000 ;; 12345678 ~ 12{,}345{,}678 ~ 12\,345\,678
18 ~ \$18.00 ~ 18 dollars ~ $18$ ;; 50\% ~ 50 ~ 0.5 ~ 50% ;; \frac12 ~ 50\% ;; 90^\circ ~ 90 ~ 90°
90 ~ 90^{\circ} ~ 90\text{ degrees} ;; 5 ~ 5\text{ cm} ~ x=5 ~ x = 5 ~ +5 ;; 5 \text{ cm} ~ 5 cm ~ 5
25 \text{ cm}^2 ~ 25 cm^2 ;; 60 ~ 60 miles ;; 12 ~ 12\text{ apples} ;; x=5 ~ 5 ~ x=5 ;; f(x)=2x+1 ~ 2x+1
2x+1 ~ f(x) = 1+2x ;; y=2x+3 ~ y = 3 + 2x ~ 2x-y+3=0 ;; x^2-1 ~ (x-1)(x+1) ;; (x-1)(x+1) ~ (x+1)(x-1)
\frac{x+1}{2} ~ \frac{x}{2}+\frac{1}{2} ;; 2xy ~ 2yx ;; x^2 ~ x**2 ;; x^{10} ~ x^10
\sqrt{2} ~ \sqrt2 ~ sqrt(2) ~ √2 ;; \sqrt{12} ~ 2\sqrt{3} ;; 2\sqrt{3} ~ 2 \sqrt{3}
\frac{\sqrt{2}}{2} ~ \frac{1}{\sqrt{2}} ;; \sqrt[3]{2} ~ 2^{1/3} ;; \pi ~ π ;; 2\pi ~ 2 \pi ~ 2π
\frac{\pi}{3} ~ \pi/3 ;; e^2 ~ e^{2} ;; \ln 2 ~ \ln(2) ;; \ln 4 ~ 2\ln 2 ;; \log_2 3 ~ \frac{\ln 3}{\ln 2}
3+4i ~ 4i+3 ;; 2^{10} ~ 1024 ;; 1024 ~ 1024 ;; 10^{6} ~ 1000000 ;; 1200000 ~ 1.2 \times 10^6 ~ 1.2e6
120000 ~ 1.2 \cdot 10^{5} ;; 5! ~ 120 ;; (1,2) ~ (1, 2) ~ \left(1,2\right) ~ ( 1 , 2 )
(\frac12, 3) ~ (0.5, 3) ;; [1,2) ~ [1, 2) ~ \left[1,2\right) ~ 1 \le x < 2
(-\infty, 3] ~ (-\infty,3] ~ x \in (-\infty, 3] ;; x>3 ~ (3,\infty) ;; (3,\infty) ~ x > 3 ~ 3 < x
1<x\leq 2 ~ (1,2] ;; (-\infty,-1)\cup(1,\infty) ~ (1,\infty) \cup (-\infty,-1) ;; \{1,2,3\} ~ \{3, 2, 1\}
1,2,3 ~ 3, 2, 1 ;; 1,2 ~ 1 and 2 ~ x=1 or x=2 ~ x = 1, x = 2 ;; \pm 3 ~ 3, -3 ;; 3,-3 ~ \pm 3
x=\pm 3 ~ \{3,-3\} ;; 1 \pm \sqrt{2} ~ 1+\sqrt{2}, 1-\sqrt{2}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}1/2\\3\end{pmatrix} ~ \begin{pmatrix}\frac12\\3\end{pmatrix} ;; \text{Evelyn} ~ Evelyn
Evelyn ~ evelyn ;; \text{(C)} ~ C ;; C ~ (C) ~ \text{C} ;; (C) ~ \textbf{(C)} ;; \text{Monday} ~ Monday
\text{yes} ~ yes ;; \text{no solution} ~ no solution ;; even ~ \text{even} ;; \emptyset ~ \varnothing
1011_2 ~ 1011_{2} ~ 1011 ;; \frac{5}{6} ~ \boxed{\frac{5}{6}} ;; 3\sqrt{13} ~ 3\sqrt{13}. ;; p - q ~ p-q
\frac{n(n+1)}{2} ~ \frac{n^2+n}{2} ;; x^2+C ~ \frac{2x^2}{2}+C ;; -3 ~ −3 ;; 7 ~ 7.
11\sqrt2 ~ 11 \sqrt{2} ;; \frac{9}{4} ~ 2.25 ;; 70 ~ 70.00 ;; 6 ~ 6\,
(0,9)\cup (9,36) ~ (0,9) \cup (9,36) ;; \frac{14}{3} ~ \frac{14}{3}
\left( 3, \frac{\pi}{2} \right) ~ (3, \pi/2) ;; -2 ~ - 2 ;; \frac{3}{56} ~ 3/56 ;; 142857 ~ 142,857
x_1 ~ x_{1} ;; \sin^2 x ~ (\sin x)^2 ;; \cos(2x) ~ 1-2\sin^2 x ;; |x| ~ \sqrt{x^2} ;; \binom{5}{2} ~ 10
8 ~ 8 units ;; 4\frac{1}{3} ~ \frac{13}{3} ;; 10\% ~ 10 percent ;; 45 ~ 45 \% ;; 1 ~ 1.000
\alpha+1 ~ 1+\alpha
"""
DIFFERENT = r"""
1791 ~ 37*48+15 ;; 4 ~ 2+2 ~ \sqrt{16} ~ 8/2 ~ 3, 4, 5 ~ 3 or 4 ~ \{3,4\} ~ x - x + 4 ;; 1024 ~ 2^{10}
1/2 ~ \sin(\pi/6) ~ \frac{2}{4} ;; 120 ~ 5! ;; 8 ~ 2^3 ;; 42 ~ 41+1
3 ~ \pm 3 ~ 3,3 ~ -3 ~ 1e999 ~ nan ~ inf ~ 3i ~ ³ ;; 1,2 ~ 1,2,3 ~ 1 ;; 1,1 ~ 1 ;; \frac12 ~ 2 ~ \frac21
2 ~ \frac{1}{2} ~ 1/2 ~ \sqrt{2} ;; 1000 ~ 1 ;; 1 ~ 1,000 ~ 0.9999999999999 ;; -3 ~ 3 ;; nan ~ 3
\infty ~ -\infty ~ 1e999 ;; 5 \text{ cm} ~ 5 \text{ m} ;; 5 \text{ kg} ~ 5 \text{ g}
5 ~ 5 million ~ 1=2=5 ;; 5 million ~ 5 ;; 1011_2 ~ 1011_3 ;; 50\% ~ 5000 ;; 50 ~ 0.5
(1,2) ~ (2,1) ~ [1,2] ~ 1,2,3 ;; [1,2) ~ [1,2] ~ (1,2) ;; x>3 ~ x\ge 3 ~ x<3 ;; 1<x<2 ~ 1<x<3
y=2x+3 ~ y=2x-3 ~ 2x+y+3=0 ~ 0=0 ;; x=5 ~ x=6 ~ y ;; |x| ~ x ;; \sqrt{x^2} ~ x ;; x^2 ~ x^3 ;; x+1 ~ x
2xy ~ 2x ~ 2 ;; x ~ y ~ x - x + x + y - y ;; C ~ B ~ A, B, C, D ~ A B C D ;; (C) ~ (A)(B)(C)(D)
\text{Evelyn} ~ Evelyn Bob ;; \text{yes} ~ \text{yes no} ;; \sqrt{2} ~ 1.414 ~ 1.4142 ;; \pi ~ 3.14 ~ 22/7
\frac{1}{3} ~ 0.333 ~ 0.333333333333 ;; 2^{2023} ~ 2^{2023}+1 ;; 2^{100} ~ 1267650600228229401496703205377
1267650600228229401496703205376 ~ 1267650600228229401496703205377
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&5\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1&2&3&4\end{pmatrix}
7 ~ 9^{9^{9^{9}}} ~ 1/0 ~ 0/0 ~ ((((((((7 ~ 7)))) ~ \frac{7}{} ~ 7 8 ~ {{7} ~ \boxed{7}\boxed{8} ~ 7\\8
e ~ 2.718 ;; i ~ 1 ;; e^{-30} ~ 0
0 ~ 10^{-300} ~ 0.0000000000001 ;; 0.1 ~ 0.10000000000000001 ;; x^2+2x+1 ~ x^2+2x
"""


def rows(table):
    for entry in re.split(r" ;; |\n", table.strip()):
        answer, *outputs = entry.split(" ~ ")
        yield from ((answer, output) for output in outputs)


def test_is_equal_accepts_equal_forms():
    assert [(answer, output) for answer, output in rows(EQUAL) if not is_equal(output, answer)] == []


def test_is_equal_rejects_other_answers():
    """These include unevaluated expressions of the question, several answers, nan and look-alikes."""
    assert [(answer, output) for answer, output in rows(DIFFERENT) if is_equal(output, answer)] == []
    look_alikes = {"3": "3\u200b", "12": "1\u200b2", "x": "\u0445", "7": "\uff17"}
    assert not any(is_equal(output, answer) for answer, output in look_alikes.items())


HOSTILE = r"( 9^ 9^{ \frac{ 1, - 5! \pm \sqrt[ x< x^{x^{ (x+1)^{99} (3^{5000}) \begin{ \text{"


@pytest.mark.parametrize("unit", [*HOSTILE.split(), "3^{((10^{4000}+1)/10^{4001})}", "1 1/2 "])
def test_is_equal_handles_hostile_outputs_quickly(unit):
    began = time.process_time()
    for answer in ("7", "x^2", "1,2", "x>3", "y=x"):
        assert not is_equal(unit * (2000 // len(unit)), answer)
    assert time.process_time() - began < 5  # unbounded powers take minutes
